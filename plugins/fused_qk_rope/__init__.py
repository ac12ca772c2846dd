"""FusedQKRope: rotates the queries and keys of one attention layer in one pass."""
