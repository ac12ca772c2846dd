"""What can be wrong with the things a user hands in."""


class InputError(ValueError):
    """A checkpoint, config or image that cannot be used; the message says what, where and what to do."""


class ConfigError(InputError):
    """A config that names something this tower does not compute, or lacks what it needs."""


class CheckpointError(InputError):
    """A checkpoint whose files or vision tensors are missing, extra, misshapen or unreadable."""


class ImageError(InputError):
    """An image or a grid that the family's preprocessing rule refuses."""
