"""``ncclguard doctor``: checks of the hosts, the network and the settings of a job, each with what to do about it."""
