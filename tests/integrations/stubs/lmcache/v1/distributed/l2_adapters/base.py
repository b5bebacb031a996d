from abc import ABC, abstractmethod


class L2AdapterInterface(ABC):
    def __init__(self, max_capacity_bytes=0):
        self._listeners = []

    @abstractmethod
    def get_store_event_fd(self):
        raise NotImplementedError

    @abstractmethod
    def get_lookup_and_lock_event_fd(self):
        raise NotImplementedError

    @abstractmethod
    def get_load_event_fd(self):
        raise NotImplementedError

    @abstractmethod
    def submit_store_task(self, keys, objects):
        raise NotImplementedError

    @abstractmethod
    def pop_completed_store_tasks(self):
        raise NotImplementedError

    @abstractmethod
    def submit_lookup_and_lock_task(self, keys, group_layout_descs):
        raise NotImplementedError

    @abstractmethod
    def query_lookup_and_lock_result(self, task_id):
        raise NotImplementedError

    @abstractmethod
    def submit_unlock(self, keys):
        raise NotImplementedError

    @abstractmethod
    def submit_load_task(self, keys, objects):
        raise NotImplementedError

    @abstractmethod
    def query_load_result(self, task_id):
        raise NotImplementedError

    @abstractmethod
    def close(self):
        raise NotImplementedError

    def register_listener(self, listener):
        self._listeners.append(listener)

    def _notify_keys_stored(self, keys, sizes):
        for listener in self._listeners:
            listener.on_l2_keys_stored(keys, sizes)

    def _notify_keys_accessed(self, keys):
        for listener in self._listeners:
            listener.on_l2_keys_accessed(keys)

    def _notify_keys_deleted(self, keys, sizes):
        for listener in self._listeners:
            listener.on_l2_keys_deleted(keys)
