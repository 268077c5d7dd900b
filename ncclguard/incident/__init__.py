"""What happened when an operation failed, for people and for programs: the record, its page, its files, the stacks."""
