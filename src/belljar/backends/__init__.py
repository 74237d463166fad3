"""Isolation technologies behind one seam: `base` has the contract, `registry` finds them."""
