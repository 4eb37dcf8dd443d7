"""What travels between agent and collector and what is stored; imports nothing else of ours."""
