"""What is true: cases, the definition, certified enclosures, the ledger and the bounds."""
