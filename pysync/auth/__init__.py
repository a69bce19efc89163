"""Who a caller is and what they may do: certificates, signatures, policies, spaces and revocation."""
