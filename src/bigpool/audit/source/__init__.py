"""The source front end: reads Python with the standard library alone, imports nothing and runs nothing."""
