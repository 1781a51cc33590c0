"""The experiments, by what is trained; `registry` has all of them."""
