"""What happened, for people and for programs: the model, its texts, and the stacks."""
