"""Records of a failed operation, for people and for programs: the incident, its page, its files, the stacks."""
