"""The report of one incident: a panel for the terminal, a JSON file, and a page with a timeline."""
