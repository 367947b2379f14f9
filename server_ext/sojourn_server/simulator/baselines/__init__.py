"""What sojourn is compared with, one file each."""
