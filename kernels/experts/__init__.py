"""Feed-forward experts: products of rows with the weights of the experts that were chosen for them."""
