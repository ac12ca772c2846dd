"""Operators that a kvit graph needs, in every place where they run."""
