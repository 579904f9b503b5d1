"""What a vLLM command line compiles: its flags, variables, model and world of ranks, read without importing vLLM."""
