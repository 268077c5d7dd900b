"""The same training as each way's documentation has it written; `benchmarks.peers.going_on` kills a rank of each."""
