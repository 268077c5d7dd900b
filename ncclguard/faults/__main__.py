"""Runs one function in a rank process: `python -m ncclguard.faults MODULE[=FILE] FUNCTION JSON_ARGUMENTS`."""

from ncclguard.faults.rank import main

if __name__ == "__main__":
    main()
