"""JAX's modules; `backend/interface.py` says what each defines."""
