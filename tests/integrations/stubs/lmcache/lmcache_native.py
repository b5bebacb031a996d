"""LMCache's Bitmap, which is compiled."""


class Bitmap:
    def __init__(self, size):
        self.size, self.bits = size, set()

    def set(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        self.bits.add(index)

    def test(self, index):
        return index in self.bits
