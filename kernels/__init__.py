"""What is put to the test: candidates, their adapters, and kernels of our own."""
