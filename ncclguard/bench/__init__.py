"""Side-by-side timing of plain and guarded collectives: `python -m ncclguard.bench`."""
