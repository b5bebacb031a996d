from .event_notifier import create_event_notifier

__all__ = ["create_event_notifier"]
