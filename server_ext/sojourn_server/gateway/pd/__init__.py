"""Prefill and decode on separate engines: which two serve a request, and how it goes from one to the next."""
