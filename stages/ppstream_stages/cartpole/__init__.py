"""The embedded demo: a cart-pole robot, the policy that balances it, and its training."""
