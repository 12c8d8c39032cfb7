"""What things cost: seconds of operators and copies, bytes of devices, hosts and models."""
