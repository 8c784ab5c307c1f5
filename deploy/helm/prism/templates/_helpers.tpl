{{- define "prism.name" -}}
{{- if contains "prism" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-prism{{ end }}
{{- end }}

{{- define "prism.selector" -}}
app.kubernetes.io/name: prism
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "prism.labels" -}}
{{ include "prism.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "prism.image" -}}
{{- $repository := required "image.repository: name the image that deploy/docker/Dockerfile built" .Values.image.repository }}
{{- if .Values.image.digest }}{{ $repository }}@{{ .Values.image.digest }}
{{- else }}{{ $repository }}:{{ .Values.image.tag }}
{{- end }}
{{- end }}

{{- define "prism.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "prism.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{/* The Secret with keys.yaml; empty without keys. */}}
{{- define "prism.keysSecret" -}}
{{- if .Values.keys.existingSecret }}{{ .Values.keys.existingSecret }}
{{- else if .Values.keys.create }}{{ include "prism.name" . }}-keys
{{- end }}
{{- end }}

{{/* Port and scheme of the API. */}}
{{- define "prism.port" -}}
{{- if .Values.existingConfigSecret }}8000{{ else }}{{ dig "frontend" "port" 8000 .Values.config }}{{ end }}
{{- end }}
{{- define "prism.scheme" -}}
{{- if .Values.tlsSecret }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{/* The YAML with what other values imply. */}}
{{- define "prism.config" -}}
{{- $config := deepCopy .Values.config }}
{{- $access := dict }}
{{- if include "prism.keysSecret" . }}{{ $_ := set $access "keys" "/etc/prism-keys/keys.yaml" }}{{ end }}
{{- if .Values.openToAll }}{{ $_ := set $access "open_to_all" true }}{{ end }}
{{- if $access }}{{ $_ := set $config "access" (merge $access (default dict $config.access)) }}{{ end }}
{{- if .Values.tlsSecret }}
{{- $tls := dict "tls_certificate" "/etc/prism-tls/tls.crt" "tls_key" "/etc/prism-tls/tls.key" }}
{{- $_ := set $config "frontend" (merge $tls (default dict $config.frontend)) }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{/* Stops on values that cannot be combined. */}}
{{- define "prism.check" -}}
{{- if and .Values.keys.existingSecret .Values.keys.create }}
{{- fail "keys: existingSecret cannot be combined with create" }}
{{- end }}
{{- if and .Values.podMonitor.enabled .Values.keys.create }}
{{- $found := false }}
{{- range .Values.keys.create }}{{ if and (eq .name "prometheus") .operator }}{{ $found = true }}{{ end }}{{ end }}
{{- if not $found }}
{{- fail "podMonitor.enabled: needs an entry of keys.create with the name prometheus and operator: true" }}
{{- end }}
{{- end }}
{{- if not .Values.existingConfigSecret }}
{{- $gpus := 0 }}
{{- range .Values.config.devices }}{{ if hasPrefix "cuda:" .name }}{{ $gpus = add1 $gpus }}{{ end }}{{ end }}
{{- if ne (int $gpus) (int .Values.gpus) }}
{{- fail (printf "gpus: %d must be the number of devices cuda:N in config, which is %d" (int .Values.gpus) (int $gpus)) }}
{{- end }}
{{- $access := default dict .Values.config.access }}
{{- if not (or (include "prism.keysSecret" .) .Values.openToAll $access.keys_variable) }}
{{- fail "keys: set existingSecret or create, or openToAll to serve without keys" }}
{{- end }}
{{- if and (dig "frontend" "tls_certificate" "" .Values.config) (not .Values.tlsSecret) }}
{{- fail "config.frontend.tls_certificate: is set by tlsSecret; name a Secret there" }}
{{- end }}
{{- if dig "frontend" "admin" "" .Values.config }}
{{- fail "config.frontend.admin: is not supported by the chart's probes and PodMonitor; remove it" }}
{{- end }}
{{- end }}
{{- end }}
