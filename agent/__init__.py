"""Lives in the training process: measures, and pushes to the collector."""
