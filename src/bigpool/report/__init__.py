"""One self-contained HTML page made from records. It needs neither torch nor triton, and reads records as untrusted input."""
