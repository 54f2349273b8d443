"""Cases, float64 reference and comparisons of ``python -m gdn_paged check``."""
