"""The rank-0 daemon: takes what the agents push, orders it, journals it and writes the logs."""
