from enum import Enum


class HookType(Enum):
    AFTER = "after"


class HookRegistry:
    hooks = []

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        cls.hooks.append((target, hook, hook_type))
