"""What the operations do. `table` puts them together; each other module has those about one thing."""
