"""``ncclguard doctor``: checks of host and network, with what to do about each."""
