"""This package has small programs that use Sluice's client; README.md says what each one shows."""
