"""Find, confirm, fix, prove, price: from a script to one report."""
