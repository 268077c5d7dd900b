"""Communicators that can be bounded, stopped and rebuilt: `base` says what one does, `gloo` and `nccl` do it."""
