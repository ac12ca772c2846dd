"""The pipeline from a checkpoint to a judged artifact, and its command line."""
