class L2StoreResult(int):
    def __new__(cls, success, bytes_transferred):
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self):
        return int(self) >= 0

    def bytes_transferred(self):
        return max(0, int(self))
