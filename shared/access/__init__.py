"""Who may call whom: proofs of the deployment's secret, clients' tokens, certificates."""
