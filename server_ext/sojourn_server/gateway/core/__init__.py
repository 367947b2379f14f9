"""What a gateway decides, without I/O and without a clock."""
