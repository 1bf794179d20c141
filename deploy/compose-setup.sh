# Makes what the services of compose.yaml have in common, at the first start: the server secret, a token for clients, the
# password of the Valkey. Runs as root in the tierkv image; $1 is put before all paths.
set -eu
umask 077
root=${1:-}

if [ ! -e "$root/tierkv/ready" ]; then
    head -c 32 /dev/urandom > "$root/tierkv/secret"
    od -An -v -tx1 -N24 /dev/urandom | tr -d ' \n' > "$root/tierkv/valkey-password"
    tierkv token new --state-dir "$root/tierkv" --tenant default --role operator > "$root/tierkv/token"
    touch "$root/tierkv/ready"
fi
cp "$root/deploy/valkey.conf" "$root/valkey/valkey.conf"
sed "s/CHANGE-ME/$(cat "$root/tierkv/valkey-password")/" "$root/deploy/valkey-users.conf" > "$root/valkey/users.conf"
chown -R 999:999 "$root/valkey"
for state in "$root/state-a" "$root/state-b"; do
    install -m 0600 -o 10001 -g 10001 "$root/tierkv/tokens.yaml" "$state/tokens.yaml"
    chown 10001:10001 "$state"
    chmod 0700 "$state"
done
chown -R 10001:10001 "$root/tierkv"
