import os
from abc import ABC, abstractmethod


class EventNotifier(ABC):
    @abstractmethod
    def fileno(self):
        raise NotImplementedError

    @abstractmethod
    def notify(self):
        raise NotImplementedError

    @abstractmethod
    def consume(self):
        raise NotImplementedError

    @abstractmethod
    def notify_fileno(self):
        raise NotImplementedError

    @abstractmethod
    def close(self):
        raise NotImplementedError


class PipeNotifier(EventNotifier):
    def __init__(self):
        self._read, self._write = os.pipe()

    def fileno(self):
        return self._read

    def notify(self):
        os.write(self._write, b"!")

    def consume(self):
        os.read(self._read, 1)

    def notify_fileno(self):
        return self._write

    def close(self):
        os.close(self._read)
        os.close(self._write)


def create_event_notifier():
    return PipeNotifier()
