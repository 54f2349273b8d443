"""What ``python -m gdn_paged bench`` and ``explain`` are made of."""
