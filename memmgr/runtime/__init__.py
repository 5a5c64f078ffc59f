"""One open budget, from opening to closing."""
