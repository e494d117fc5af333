"""What halfbyte writes to disk and how: errors, atomic files, digests, manifests and evaluation records."""
