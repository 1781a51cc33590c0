"""The experiments, in modules by what is trained; `registry` lists all of them."""
