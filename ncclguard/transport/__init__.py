"""Communicators that can be bounded, stopped and rebuilt: `base` says what one does; `streams` (CPU), `nccl` (CUDA)."""
