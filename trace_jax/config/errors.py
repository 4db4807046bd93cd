"""How a setting is refused: in one line that says which, and what to write."""

import difflib


class ConfigError(ValueError):
    """A setting that cannot work; the message says which, and what to write."""


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def choice(path: str, value: str, choices) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{path} is {value!r}; {hint}write one of {', '.join(choices)}")
