{{- define "steersman.labels" -}}
{{ include "steersman.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "steersman.selector" -}}
app.kubernetes.io/name: steersman
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "steersman.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end }}

{{- /* The pages have a name of their own: their pods must not count as steersman's. */}}
{{- define "steersman.ui" -}}
{{ .Release.Name }}-ui
{{- end }}

{{- define "steersman.uiSelector" -}}
app.kubernetes.io/name: steersman-ui
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "steersman.uiLabels" -}}
{{ include "steersman.uiSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "steersman.stateSecret" -}}
{{ .Values.ui.existingSecret | default (printf "%s-state" .Release.Name) }}
{{- end }}

{{- define "steersman.account" -}}
{{ .Values.serviceAccount.name | default .Release.Name }}
{{- end }}

{{- define "steersman.configMap" -}}
{{ .Values.existingConfigMap | default .Release.Name }}
{{- end }}

{{- /* What both containers have: image, environment, mounts. */}}
{{- define "steersman.container" -}}
image: {{ include "steersman.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - name: NODE_NAME
    valueFrom:
      fieldRef:
        fieldPath: spec.nodeName
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
volumeMounts:
  - name: config
    mountPath: /var/lib/kube-proxy
    readOnly: true
  {{- if .Values.hostPaths.modules }}
  - name: modules
    mountPath: /lib/modules
    readOnly: true
  {{- end }}
  {{- if .Values.hostPaths.xtablesLock }}
  - name: xtables-lock
    mountPath: /run/xtables.lock
  {{- end }}
  {{- if .Values.ui.enabled }}
  - name: state
    mountPath: /var/run/steersman/state
    readOnly: true
  {{- end }}
  {{- if include "steersman.bpf" . }}
  - name: bpf
    mountPath: /sys/fs/bpf
  - name: cgroup
    mountPath: /sys/fs/cgroup
    readOnly: true
  {{- end }}
{{- end }}

{{- /* Whether the pins of the ebpf mode are to be reached: "true" or nothing. */}}
{{- define "steersman.bpf" -}}
{{- if or (eq .Values.mode "ebpf") .Values.hostPaths.bpf }}true{{ end }}
{{- end }}

{{- /* The capabilities given, or else those that the mode needs, as a JSON list. */}}
{{- define "steersman.capabilities" -}}
{{- $needed := list "NET_ADMIN" "NET_RAW" "SYS_RESOURCE" }}
{{- if eq .Values.mode "ebpf" }}
{{- $needed = concat $needed (list "BPF" "PERFMON" "SYS_ADMIN") }}
{{- end }}
{{- .Values.capabilities | default $needed | toJson }}
{{- end }}

{{- define "steersman.args" -}}
- --config=/var/lib/kube-proxy/config.conf
- --hostname-override=$(NODE_NAME)
{{- with .Values.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* setpriv's way to write the capabilities to hand on: +net_admin,+net_raw */}}
{{- define "steersman.setpriv" -}}
{{- $words := list }}
{{- range include "steersman.capabilities" . | fromJsonArray }}
{{- $words = append $words (printf "+%s" (lower .)) }}
{{- end }}
{{- join "," $words }}
{{- end }}
