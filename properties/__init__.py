"""What must hold: strategies, properties, the judge, replay."""
