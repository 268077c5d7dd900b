"""A channel from a trainer to its inference engines: versions of weights that all engines have, or none serves.

>>> from ncclguard.weights import Receiver, Sender
"""

from __future__ import annotations

from ncclguard.weights.receiver import Receiver, Update
from ncclguard.weights.sender import Published, Sender

__all__ = ["Published", "Receiver", "Sender", "Update"]
