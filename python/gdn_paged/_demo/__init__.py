"""A small inference engine around the paged calls: what ``python -m gdn_paged demo`` runs."""
