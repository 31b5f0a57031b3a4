"""The launch front end: what the JIT was asked to compile, read from its TTIR. Importing it loads no triton."""
