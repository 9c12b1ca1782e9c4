"""What requests cost, one row each."""
